# relu(z - tau), with the tau for which a row sums to 1 (Martins and Astudillo 2016).
attention = "sparsemax"
