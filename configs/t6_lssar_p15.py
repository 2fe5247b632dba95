# Ours: T6 small with LSSAR, p = 15, as the earlier version of the LSSAR paper recommends (without
# numbers). At another scale the file in scales/t6/ goes behind its own.
from configs.t6 import *

attention = "lssar"
p = 15
