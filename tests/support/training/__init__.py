"""Models and their training under data parallel: programs, faults to plant, and what runs them."""
