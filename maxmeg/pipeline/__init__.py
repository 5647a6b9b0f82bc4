"""Pipeline parallelism: schedules as integer tables, and the one program that runs any of them."""
