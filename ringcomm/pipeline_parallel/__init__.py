"""Pipeline parallelism: splitting a model (`cuts`, `balance`), schedules as data with their proof and picture
(`schedules`, `check`, `picture`), and their execution (`pipeline`)."""
