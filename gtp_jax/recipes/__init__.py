"""Recipes: what is quantized, and how. A recipe is small, frozen, and given once for a whole model."""

from ._check import check_recipe as check_recipe
from ._phases import Phases as Phases
from ._phases import recipe_at as recipe_at
from ._phases import recipes_of as recipes_of
from ._recipe import BF16 as BF16
from ._recipe import EXCLUDED as EXCLUDED
from ._recipe import FP8 as FP8
from ._recipe import GRAD_WIRES as GRAD_WIRES
from ._recipe import MXFP8 as MXFP8
from ._recipe import NVFP4 as NVFP4
from ._recipe import RECIPES as RECIPES
from ._recipe import FP8Blocks as FP8Blocks
from ._recipe import FP8Delayed as FP8Delayed
from ._recipe import Recipe as Recipe
from ._recipe import matches as matches
from ._scope import current_recipe as current_recipe
from ._scope import recipe_of_call as recipe_of_call
from ._scope import use_recipe as use_recipe
