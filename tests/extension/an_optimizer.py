import autopar

autopar.register_optimizer("lion", tensors=1)
autopar.register_optimizer("adam8bit", bytes_per_element=2 * (1 + 4 / 256))
