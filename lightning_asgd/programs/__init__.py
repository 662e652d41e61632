"""What programs do beside plain training: units, weights they set, callbacks with modules, log lines."""
