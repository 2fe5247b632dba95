# Ours: T6 small with LSSAR, p = 15, as the earlier version of the LSSAR paper recommends (without
# numbers). At another scale, name its file in scales/t6/ after it: docs/t6.md.
from configs.t6 import *

attention = "lssar"
p = 15
