"""An iterable dataset that takes its part as the variables RANK and WORLD_SIZE say."""

from self_sharding import AsVariablesSay, main

if __name__ == "__main__":
    main(AsVariablesSay)
