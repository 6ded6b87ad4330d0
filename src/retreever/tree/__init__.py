"""Trees over context tokens: their shape, their leaf order, and how nodes summarise their children."""
