"""Built-in configurations: --config=NAME[:ARGUMENT] calls get_config() of a module here."""
