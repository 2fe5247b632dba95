# For a laptop: tiny_muon.py with windows of 512 bytes, over short documents: two or three a window.
from configs.scales.tiny_muon import *

block_size = 512
data_dir = "data/documents_bytes"  # results/tiny_documents/documents/notes.md makes them
batch_size = 4
