"""What the user reads: tables, and the values they are made from."""
