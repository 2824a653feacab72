"""A run on its ranks: started, warmed up, trained or scored, and the machine checked."""
