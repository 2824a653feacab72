"""Values: the ways a tensor can lie, on which ranks, and both as a layout. No communication."""
