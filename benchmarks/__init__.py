"""How fast megacore is, beside other ways to do the same, on the machine at hand."""
