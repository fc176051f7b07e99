"""`python -m recipes.musique`: the recipe of its README."""

from recipes.command import main
from recipes.musique.data import RECIPE

if __name__ == "__main__":
    main(RECIPE)
