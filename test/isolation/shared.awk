# awk -f test/isolation/shared.awk name.spec name.spec|name.out
#
# Prints the second file, a spec or its expected output, without the permutations that the
# spec marks as "extension only". The expected output begins with the names of the steps that
# no other permutation uses, as isolationtester prints them.

FNR == 1 { file++ }

file == 1 && /^step[ \t]/ { steps[$2] }
file == 1 && /^permutation/ {
	permutation++
	if (/# extension only: /)
		without[permutation]
	else
		for (i = 2; i <= NF && $i !~ /^#/; i++) {
			sub(/\(.*/, "", $i)
			used[$i]
		}
}

file == 2 && /^Parsed test spec/ {
	sort = "LC_ALL=C sort"
	for (name in steps)
		if (!(name in used))
			print "unused step name: " name | sort
	close(sort)
}
file == 2 && /^(starting )?permutation/ { current++ }

# The blank line in front of a permutation belongs to it.
file == 2 && blank && !((/^starting / ? current : current + 0) in without) { print "" }
file == 2 { blank = ($0 == "") }
file == 2 && !blank && !(current in without)
END { if (blank && !(current in without)) print "" }
