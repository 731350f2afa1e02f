"""Models that tensor, pipeline and context parallel divide: programs, faults to plant, and what runs them."""
