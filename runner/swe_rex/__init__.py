"""SWE-ReX: its protocol of remote shells and files, over our sandboxes."""
