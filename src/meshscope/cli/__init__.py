"""The command line: parses options, calls the API, renders the result."""
