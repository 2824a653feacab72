"""Where rows live, the kernels that read and update them, and the choice among those."""
