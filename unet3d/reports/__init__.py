"""What people read and look at: tables, pictures, the live line."""
