"""Tables, pictures, pages and the live line."""
