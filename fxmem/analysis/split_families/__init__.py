"""How ATen ops run part by part, family by family: each module ends in a table `RULES`, op -> rule."""
