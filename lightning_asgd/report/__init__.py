"""The page and pictures of a fit."""
