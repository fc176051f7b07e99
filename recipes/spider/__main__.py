"""`python -m recipes.spider`: the recipe of its README."""

from recipes.command import main
from recipes.spider.data import RECIPE

if __name__ == "__main__":
    main(RECIPE)
