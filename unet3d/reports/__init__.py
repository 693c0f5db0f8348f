"""Tables, pictures and the live line: everything that people read and look at."""
