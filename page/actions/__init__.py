"""Actions of the page: what people may change by it, asked first, carried out by the services, and written down."""
