"""The policies that come with polymp, one TOML file each. `polymp.rules.policy.load` reads them."""
