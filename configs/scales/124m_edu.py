# GPT-2-124M on FineWeb-Edu (LSSAR, Appendix B.4): the default recipe, 18,865 steps, on other data:
# python -m data.fineweb --dataset fineweb-edu
data_dir = "data/fineweb_edu10B"
