# Ours: T6 small with LSSAR, p = 15, as the earlier version of the LSSAR paper recommends (without
# numbers). At another scale, add the scale's file of scales/t6/ after this file: docs/t6.md.
from configs.t6 import *

attention = "lssar"
p = 15
