"""Plain training loops and Fabric."""
