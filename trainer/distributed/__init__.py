"""Workers under Ray, driven by verl's own trainer."""
