"""The methods: a file each, with what it alone needs."""
