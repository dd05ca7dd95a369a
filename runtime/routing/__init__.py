"""Choice among several engines, or servers, of one model by what they have in their prefix caches."""
