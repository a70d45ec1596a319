"""The policies that come with polymp, one TOML file each. `polymp.rules.load` reads them."""
