"""Built-in configurations: --config=configs/NAME.py[:ARGUMENT], in short NAME[:ARGUMENT], is what
get_config(ARGUMENT) of that file returns. They are imported as maxmeg.configs."""
