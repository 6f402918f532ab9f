"""The methods: a file each, with what only it needs."""
