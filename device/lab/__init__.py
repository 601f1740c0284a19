"""A lab: boards that several users share through labgrid's coordinator."""
