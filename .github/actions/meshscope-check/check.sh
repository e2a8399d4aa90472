#!/usr/bin/env bash
# check.sh BUDGET BASE FOLDER [PREPARE]: checks the budget on the working tree, and writes FOLDER/comment.md,
# which compares each program with the same program of the commit BASE, if there is one. The shell command
# PREPARE comes before each check, and writes the runs that the budget names.
set -uo pipefail
budget=$1 base=$2 folder=$3 prepare=${4:-true}
rm -rf "$folder"
mkdir -p "$folder"

bash -c "$prepare" >&2 || exit
meshscope check "$budget" --format github --out "$folder/head" | tee "$folder/annotations.txt"
status=${PIPESTATUS[0]}

if [ -n "$base" ] && git fetch --quiet --depth 1 origin "$base" 2>/dev/null || git cat-file -e "$base^{commit}" 2>/dev/null; then
  git worktree add --quiet --detach --force "$folder/tree" "$base"
  # A budget that the base has not, or breaks, is no fault of this change.
  (cd "$folder/tree" && bash -c "$prepare" && meshscope check "$budget" --out "$folder/base") >"$folder/base.txt" 2>&1 || true
  git worktree remove --force "$folder/tree"
fi

{
  echo "### Collectives of \`$budget\`"
  if [ "$status" -eq 0 ]; then echo "All limits are kept."; else echo "**A limit is not kept.**"; fi
  sed -n 's/^::error [^:]*::/- /; T; s/%0A/\n  - /g; s/%25/%/g; p' "$folder/annotations.txt"
  for head in "$folder"/head/*/; do
    [ -d "$head" ] || continue
    name=$(basename "$head")
    echo
    echo "**$name**"
    if [ -d "$folder/base/$name" ]; then
      echo '```text'
      (cd "$folder" && meshscope compare "base/$name" "head/$name" --full 2>&1 | head -60)
      echo '```'
    else
      echo "New, or not compiled at the base of this pull request."
    fi
  done
} >"$folder/comment.md"
exit "$status"
