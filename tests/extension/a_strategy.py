import autopar

recipe = autopar.Recipe(roles={"dp": "data", "tp": "tensor"}, shard="all", keep=True, forbid={"*.bias": "tp:S(0)"})
autopar.register_strategy("mine", recipe, baseline=True)
