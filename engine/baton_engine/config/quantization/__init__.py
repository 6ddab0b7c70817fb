"""What config.json says about quantized weights. A quant_method is one module and one line of
`read.METHODS`. No torch."""
