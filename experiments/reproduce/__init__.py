"""`farflock reproduce`: a paper's claim, our number, a verdict; the product's own nodes on a simulated network."""
