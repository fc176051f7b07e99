"""`python -m recipes.math`: the recipe of its README."""

from recipes.command import main
from recipes.math.data import RECIPE

if __name__ == "__main__":
    main(RECIPE)
