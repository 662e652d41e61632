"""An iterable dataset that divides itself by the variables RANK and WORLD_SIZE."""

from self_sharding import AsVariablesSay, main

if __name__ == "__main__":
    main(AsVariablesSay)
