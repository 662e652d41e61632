"""What every run needs: a worker, its servers, and Lightning. The core imports no feature."""
