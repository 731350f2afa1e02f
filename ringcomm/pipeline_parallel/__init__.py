"""Pipeline parallel: where a model is cut (`cuts`, `balance`), schedules as data with their proof and picture
(`schedules`, `check`, `picture`), and what runs them (`pipeline`)."""
