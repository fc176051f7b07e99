"""`python -m recipes.swe`: the recipe of its README."""

from recipes.command import main
from recipes.swe.data import RECIPE

if __name__ == "__main__":
    main(RECIPE)
