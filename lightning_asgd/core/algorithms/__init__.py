"""What an algorithm is, the default one, and the settings of an exchange."""
