"""The policies that come with polymp, one TOML file each. `polymp.policy.load` reads them."""
