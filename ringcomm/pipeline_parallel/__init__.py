"""Pipeline parallelism: splitting a model (`split`, `balance`), schedules as data with their proof and picture
(`schedules`, `check`, `picture`), and their execution (`pipeline`)."""
