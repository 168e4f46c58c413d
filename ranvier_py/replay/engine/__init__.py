"""Models of engines, as a router sees them: a block cache with a clock. Pure; the lab's fake engine uses them, too."""
