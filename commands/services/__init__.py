"""Commands that run a service, or manage a running one."""
