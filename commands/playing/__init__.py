"""Episodes that people play or watch: in a terminal (`spangrad play`), and by the page, in a process of its own."""
